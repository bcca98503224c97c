"""Describes the HTTP calls: an OpenAPI document for programs and a page that shows it to people.

Routes use `described_call`, `described_upload`, `described_reading` and `answers` from `document`; the app uses
`add_documents`. Nothing here knows what a call does.
"""
