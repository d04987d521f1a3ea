"""What can be wrong with prefect.yaml. Imports no Prefect, so that the command line can catch it at once."""


class PrefectFileError(ValueError):
    """prefect.yaml cannot be deployed until it is corrected; the message names what is wrong."""
