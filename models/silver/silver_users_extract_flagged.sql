{{ config(materialized='view') }}

{{ lakehouse_patterns.dead_letter_flags(
    landed('bronze', 'bronze_users'),
    [
        {'name': 'json_object',
         'expression': lakehouse_patterns._json_value(
            'payload',
            'struct<id: string, login: string, email: string, registered_datetime: string, '
            ~ 'first_connection_datetime: string, last_connection_datetime: string, plan: string, updated_at: string>'
         ),
         'inputs': ['payload']},
        {'name': 'id', 'expression': 'json_object.id', 'inputs': ['payload']}
    ]
) }}
