"""Sends the requests of a plan and times the answers: endpoints (`openai_http`, `deployment_grpc`), the open and the
closed loop, and the generator's own lag (`run`). It judges nothing.
"""
