"""Who may call the public API, as whom, and how much: keys, tenants, limits."""
