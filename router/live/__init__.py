"""The live page at /ui: what this router knows of its workers, queues and recent requests, for a person to look at.

`router.server` adds the routes to its HTTP apps, over a `LiveView`. In `page/`, `live.js` decides which figures and
charts there are, and `charts.js` renders any of them. This room reads the fleet, the gate and ended requests; it
decides nothing and holds no prompt, no output and no tenant.
"""
