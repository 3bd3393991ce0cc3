{{ config(
    materialized='view',
    enabled=(env_var('LAKEHOUSE_SOURCE', 'files') == 'files')
) }}

{{ lakehouse_patterns.dead_letter_flags(
    landed('bronze', 'bronze_user_changes'),
    [
        {'name': 'id', 'expression': "get_json_object(payload, '$.id')", 'inputs': ['payload']},
        {'name': 'op', 'expression': "try_element_at(map('I', 'I', 'U', 'U', 'D', 'D'), get_json_object(payload, '$.op'))",
         'inputs': ['payload']},
        {'name': 'sequence', 'expression': "try_cast(get_json_object(payload, '$.sequence') as bigint)",
         'inputs': ['payload']},
        {'name': 'changed_at',
         'expression': lakehouse_patterns._full_timestamp("get_json_object(payload, '$.changed_at')"),
         'inputs': ['payload']}
    ]
) }}
