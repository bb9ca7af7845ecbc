"""Mesh, axes, collectives with their autograd pairs, ledger, launcher: what every nanopar strategy stands on."""
