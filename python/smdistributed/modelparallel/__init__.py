"""`__version__` is the newest version of the old library whose interface is kept (clients branch on it)."""
__version__ = "1.15.0"
