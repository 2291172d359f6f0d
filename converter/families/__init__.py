"""Every architecture the converter knows, one file each: tables of rules and nothing else (models.py lists them)."""
