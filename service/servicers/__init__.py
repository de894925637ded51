"""The gRPC services that a worker offers."""
