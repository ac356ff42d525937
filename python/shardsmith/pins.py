"""The torch that the extension is built for (requirements/constraints.txt has the same; a test compares them)."""
TORCH = "2.13.0"
