"""Octavo's scheduler service: owns every decision, holds no tensor."""
