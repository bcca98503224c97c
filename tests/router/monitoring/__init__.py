"""Tests the Grafana dashboards with a real Prometheus that scrapes a deployment under load."""
