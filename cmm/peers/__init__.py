"""Collective matmuls of others, called as they are: what this project compares itself with and learns from."""
