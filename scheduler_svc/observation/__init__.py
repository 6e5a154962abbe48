"""What a scheduler does and did, recorded once for everyone who asks (docs/observability.md)."""
