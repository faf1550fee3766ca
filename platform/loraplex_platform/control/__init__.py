"""The control API: what administrators and the console do to tenants, keys, adapters and deployments.

Never on the path of a tenant's request: the data plane serves while this process is down.
"""
