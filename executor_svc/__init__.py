"""Octavo's executor service: owns every byte of K/V, decides nothing."""
