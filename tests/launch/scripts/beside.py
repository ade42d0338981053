"""A module beside a script."""

MESSAGE = "this is the script's own error"
