{{ config(
    materialized='view',
    enabled=(env_var('LAKEHOUSE_SOURCE', 'files') == 'files')
) }}

{{ lakehouse_patterns.dead_letter_flags(
    landed('bronze', 'bronze_user_changes'),
    [
        {'name': 'json_object',
         'expression': lakehouse_patterns._json_value(
            'payload',
            'struct<id: string, op: string, sequence: string, changed_at: string, login: string, email: string, '
            ~ 'registered_datetime: string, first_connection_datetime: string, last_connection_datetime: string, '
            ~ 'plan: string, is_deleted: string>'
         ),
         'inputs': ['payload']},
        {'name': 'id', 'expression': 'json_object.id', 'inputs': ['payload']},
        {'name': 'op', 'expression': "try_element_at(map('I', 'I', 'U', 'U', 'D', 'D'), json_object.op)",
         'inputs': ['payload']},
        {'name': 'sequence', 'expression': 'try_cast(json_object.sequence as bigint)', 'inputs': ['payload']},
        {'name': 'changed_at',
         'expression': lakehouse_patterns._full_timestamp('json_object.changed_at'),
         'inputs': ['payload']}
    ]
) }}
