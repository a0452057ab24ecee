"""The paper: its numbers as data, and each of its tables and figures with ours beside them."""
