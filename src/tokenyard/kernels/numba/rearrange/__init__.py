"""Copies between any two strides: by boxes, each of them filled block by block."""
