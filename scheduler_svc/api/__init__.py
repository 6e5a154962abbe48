"""The public API: bytes to validated requests, results to events, errors to statuses."""
