"""How a corpus is made: the plan, its stages, their units of work, and who runs them."""
