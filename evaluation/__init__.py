"""Evaluation: scores, figures and reports. Pure: frames and engines in, tables and figures out."""
