"""What the Python programs share. What they import goes one way: a module imports only those that stand before it."""
