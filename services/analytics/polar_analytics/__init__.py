"""Analytics: the log projected into ClickHouse, answered over HTTP, shown on a page."""
