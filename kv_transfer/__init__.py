"""Moving KV blocks between workers so that no token can depend on unconfirmed bytes."""
