"""Whether the Hugging Face token may read a model, asked before a node is paid for to find out."""

from __future__ import annotations

from jobs.errors import RequestError


def check_access(repository: str, secret: str) -> list[str]:
    """Warnings about a repository on the hub, read with this machine's token (HF_TOKEN, or that of `hf auth login`).

    Args:
      secret: the cluster's Secret of a token, "" if Jobs get none.

    Raises:
      RequestError: there is no such repository, or it is gated and the token may not read it.
    """
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    token = get_token()
    try:
        HfApi(token=token or False).auth_check(repository)
    except GatedRepoError:
        page = f"https://huggingface.co/{repository}"
        if token:
            raise RequestError(f"{repository} is gated and the token may not read it; ask on {page}") from None
        if not secret:
            raise RequestError(
                f"{repository} is gated and the Jobs have no token: give the stack one (huggingFaceToken)"
            ) from None
        return [f"{repository} is gated; set HF_TOKEN here to have it checked that the token in {secret} may read it"]
    except RepositoryNotFoundError:
        raise RequestError(
            f"{repository} is not on the hub, or the token may not see it; see the catalogue or --source"
        ) from None
    except Exception as error:
        # The hub's client has changed its HTTP library before. None of what it raises else is about the request.
        return [f"the hub could not be asked about {repository}: {' '.join(str(error).split())}"]
    return []
