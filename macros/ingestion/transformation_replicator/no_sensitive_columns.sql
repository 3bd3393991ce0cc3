{% test no_sensitive_columns(model, replica_of, contract=none) %}
    {#- One row for each column or field of the model that the contract of `replica_of` tags but doesn't transform. -#}
    {%- set leaked = [] -%}
    {%- if execute -%}
        {%- set root = lakehouse_patterns._replica_contract(replica_of, contract) -%}
        {%- set withheld = [] -%}
        {%- for path, node in lakehouse_patterns._replica_paths(root, '') if node.sensitive and not node.transform -%}
            {%- do withheld.append(path | lower) -%}
        {%- endfor -%}
        {%- for name, type in lakehouse_patterns.column_types(model).items() -%}
            {%- for path in lakehouse_patterns._replica_type_paths(name, type) if path | lower in withheld -%}
                {%- do leaked.append(path) -%}
            {%- endfor -%}
        {%- endfor -%}
    {%- endif -%}
    {%- for path in leaked %}
    select {{ lakehouse_patterns.text_literal(path) }} as column_name
    {{ 'union all' if not loop.last }}
    {%- else %}
    select 'none' as column_name where false
    {%- endfor %}
{% endtest %}
