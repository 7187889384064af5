"""HTTP without an engine: bodies, errors, the access log, chat templates, processes. The server and the router stand on it.

Public modules: `access_log`, `auth`, `body`, `chat_template`, `disconnect`, `errors`, `fields`, `json_io`, `left_out`,
`message_forms`, `messages`, `origin_form`, `process`, `shown_tools`, `special_text`, `template_fields`, `web_pages`.
"""
