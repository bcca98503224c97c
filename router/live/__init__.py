"""The live page at /ui, which shows a person what this router knows of its workers, queues and recent requests.

`router.server` adds the routes, which read a `LiveView`, to its HTTP apps. In `page/`, `live.js` decides which figures
and charts there are, and `charts.js` renders charts. The room reads the fleet, the admission gate and ended requests.
It decides nothing, and must not hold a prompt, an output or a tenant.
"""
