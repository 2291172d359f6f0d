"""Conversion Jobs: the catalogue of models, the Job's template, and what renders, submits and follows them."""
