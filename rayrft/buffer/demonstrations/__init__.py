"""Expert and offline rows: conversations and preference pairs from files, as experiences."""
