"""Networks: torsos, cores, heads, and the paths they act by."""
