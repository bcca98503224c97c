"""Computes the figures of a run: records of requests (`record`), quantiles, SLOs and goodput (`figures`, `slo`), the
file of a result (`result_file`), and whether two results differ (`compare`). Pure, except for reading files; knows no
endpoint.
"""
