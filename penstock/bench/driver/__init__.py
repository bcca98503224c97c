"""Sends the requests of a plan and times what comes back: endpoints (`openai_http`, `deployment_grpc`), the open and
the closed loop (`run`), and the measurement of the generator's own error (`own_error`). It judges nothing."""
