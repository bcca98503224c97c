"""Describes the HTTP calls to people and programs: the OpenAPI document, and a page that shows it.

Routes take `described_call`, `described_reading` and `answers` from `document`; the app takes `add_documents`. Nothing
here knows what a call does.
"""
