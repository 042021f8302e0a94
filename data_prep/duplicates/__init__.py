"""Find texts that occur twice, nearly twice, or in an evaluation file."""
