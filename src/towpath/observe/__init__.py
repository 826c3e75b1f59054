"""Prometheus metrics (`towpath.observe.metrics`, public) and OpenTelemetry traces."""
