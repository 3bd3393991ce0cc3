{{ config(materialized='view') }}

{{ lakehouse_patterns.dead_letter_flags(
    landed('bronze', 'bronze_devices'),
    [
        {'name': 'json_object',
         'expression': lakehouse_patterns._json_value(
            'payload', 'struct<type: string, full_name: string, version: string, is_deleted: string>'
         ),
         'inputs': ['payload']},
        {'name': 'type', 'expression': 'json_object.type', 'inputs': ['payload']},
        {'name': 'version', 'expression': 'json_object.version', 'inputs': ['payload']}
    ]
) }}
