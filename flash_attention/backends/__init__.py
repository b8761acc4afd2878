"""Where a call runs: one thin module a backend. They never import each other."""
