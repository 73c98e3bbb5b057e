"""Scores, baselines, figures and the report of a trained run."""
