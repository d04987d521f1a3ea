"""Where and when do flows run? Deployments, the processes that serve them, and `draftmill up`.

Knows prefect.yaml and Prefect's deployments; does not know what a flow does. Imports flows, and of serving
only `parent`; nothing imports it.
"""
