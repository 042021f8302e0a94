"""Mask tokens of packed rows: masked language modelling, and papers that compare its models."""
