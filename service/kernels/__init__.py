"""Native CPU kernels: C++ behind a C interface, built by service.kernels.build and loaded by service.kernels.library."""
