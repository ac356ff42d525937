"""Saved in one layout, resumed in another: the ranks' program and how their state is compared."""
