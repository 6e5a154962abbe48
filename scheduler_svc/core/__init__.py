"""The sans-IO core: no clock, no network, no randomness of its own."""
