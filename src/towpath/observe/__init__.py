"""What operators see: Prometheus metrics and OpenTelemetry traces."""
