"""The core of reuse, the same for all engines: look a request up, follow its lineage, register its text, report it.

Nothing here touches K/V or knows an engine; all of it runs on numpy alone. An engine adapter says what its engine did
(admitted, copied, computed again, started the request anew) and asks what follows from it.

Public modules: `announcer`, `asked`, `attempt`, `claim`, `classes`, `continuation`, `decision`, `donor_events`,
`donor_rules`, `failures`, `families`, `lineage`, `lookup`, `metrics`, `outcome`, `policy`, `reads`, `repair_time`, `report`,
`risk_samples`, `selection_names`, `sent_fronts`, `store_samples`, `stored`, `stored_donors`, `substitute`, `together`,
`verified`.
"""
