"""Tests of the Grafana dashboards against a real Prometheus that scrapes a deployment under load."""
