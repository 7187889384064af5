"""Work for a pass that no request needs: healing donors, audits of grafts, scores."""
