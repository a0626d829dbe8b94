"""Differentiable matmuls with quantised weights."""
