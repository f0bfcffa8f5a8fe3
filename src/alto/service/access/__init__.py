"""Access control: keys, tenants, and limits on requests."""

from alto.service.access.keys import (
    DEFAULT_TENANT,
    SCOPES,
    Caller,
    RateLimiter,
    caller_of,
    create_key,
    create_tenant,
    has_keys,
    list_keys,
    revoke_key,
)

__all__ = [
    "DEFAULT_TENANT",
    "SCOPES",
    "Caller",
    "RateLimiter",
    "caller_of",
    "create_key",
    "create_tenant",
    "has_keys",
    "list_keys",
    "revoke_key",
]
