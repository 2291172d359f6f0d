"""Names that fit where they go and differ between stacks and pools."""

import hashlib
import re


def fit(text: str, limit: int) -> str:
    """`text` as a lower-case DNS label of at most `limit` characters that starts with a letter.

    A text that had to be changed gets a hash of the original, so that different texts keep different names.
    """
    name = re.sub(r"[^a-z0-9-]+", "-", text.lower()).strip("-")
    if not name[:1].isalpha():
        name = f"s-{name}".rstrip("-")
    if name == text and len(name) <= limit:
        return name
    digest = hashlib.sha256(text.encode()).hexdigest()[:6]
    return f"{name[: limit - len(digest) - 1].rstrip('-')}-{digest}"
