"""How gradients become a new version of the weights, one rule a file; its name is its name on the command line.

Every rule offers `pull(into) -> version`, `push(contribution)`, `leave()`, and says with `consistent`
whether a pull is always one whole version.
"""
