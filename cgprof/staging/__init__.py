"""Host to device without a sync or an allocation."""
